"""Plans: `Graph`, `Profile` and `Cluster` in, `Plan` out; a plan as a file and as a table."""
