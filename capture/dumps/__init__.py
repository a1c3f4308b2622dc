"""Hidden states that trainers stored, made into traces: one file per form, and what they share."""
