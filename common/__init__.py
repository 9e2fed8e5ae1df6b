"""What the seven stages share and no stage teaches. Import from the modules by name."""
