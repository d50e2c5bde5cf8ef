"""llama.cpp and ggml through ctypes. No other package of ggufmoe imports ctypes."""
