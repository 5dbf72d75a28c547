"""What attention adds up, not what it weighs."""
