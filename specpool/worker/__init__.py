"""Code shared by both worker processes: settings, model thread and host, common RPCs, and the process's life cycle."""
