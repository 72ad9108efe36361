"""Training recipes: the schema, loading with overrides, and the recipes shipped as YAML beside this file."""
