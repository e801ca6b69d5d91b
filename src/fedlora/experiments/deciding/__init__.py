"""From results to verdicts: what is asked, the plan, the one look, the gate, and one error rate for a family."""
