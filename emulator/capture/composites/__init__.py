"""Composites that PyTorch and ONNX share: what neither the graph nor the hardware has as one operator, written once."""
