"""What the library installs in the user's process: each piece put there late, in a stated order, with its undo."""
