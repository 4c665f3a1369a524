"""Tables: their columns, row groups, clicks and ratings."""
