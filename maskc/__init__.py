"""maskc: a compiler for attention masks."""
