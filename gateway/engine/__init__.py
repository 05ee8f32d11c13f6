"""What is read from the engines: KV events, metrics, capabilities, and which of them are well."""
