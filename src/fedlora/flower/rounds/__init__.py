"""The rounds at the server: who is asked, what becomes of each answer, what is measured and kept."""
