"""Safetensors files as sources and destinations. Byte ranges are planned. One rank reads or writes each of them."""
