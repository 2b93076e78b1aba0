"""State by name, without gathering: which boxes of each tensor of a model and of its optimizer this rank holds."""
