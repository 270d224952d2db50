"""What two or more chapbook packages need and no method is."""
