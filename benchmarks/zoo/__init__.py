"""The zoo: tiny models of many packages, planned at two budgets and compared with eager."""
