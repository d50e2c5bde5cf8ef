"""Model files: open anything that llama.cpp opens, find the experts in it, and refuse what cannot run."""
