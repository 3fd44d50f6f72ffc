"""What tests share: a virtual world of islands, a small task."""
