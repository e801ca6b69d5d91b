"""The agreement of server and sites: settings, facts, names."""
