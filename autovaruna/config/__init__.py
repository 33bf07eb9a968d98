"""Settings and the files they come from; `resolve` reads them, `settings` declares each one once."""
