"""Who carries items out. One protocol; which of them is asked for decides nothing about what is made."""
