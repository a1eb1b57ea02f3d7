"""Plans as callers make and read them: from what they write, with every question answered."""
