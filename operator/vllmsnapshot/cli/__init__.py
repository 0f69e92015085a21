"""`kubectl vsnap`: looks at snapshots and their nodes, asks for verifications and recaptures. A user like any other: it acts
through API objects with its caller's rights, and never talks to operator or agent."""
