"""What all kernels are built of: launch, synchronisation, channels, blocks and tiles."""
