//! What every service stands on: config, logs, metrics, admin server, tasks, network.
