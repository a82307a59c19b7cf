"""What both worker processes share: settings, model thread and host, common RPCs, and the process's life."""
