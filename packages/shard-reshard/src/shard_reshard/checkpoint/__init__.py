"""Safetensors files as sources and destinations: byte ranges that are planned, each read or written by one rank."""
