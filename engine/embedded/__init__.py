"""A tiny real transformer on the CPU behind the SDK's wire protocol, offline and deterministic."""
