"""What commands have in common: their options, what the words of a user name, and how one speaks to a terminal."""
