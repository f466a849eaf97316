"""Helpers that any subpackage may import; they import no other subpackage."""
