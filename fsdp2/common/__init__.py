"""What any room may use, and which uses none of them."""
