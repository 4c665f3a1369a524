"""`bench embedding`: tables on a mesh, and their parts."""
