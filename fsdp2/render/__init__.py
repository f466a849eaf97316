"""Text for terminals and pictures: of numbers that others have made."""
