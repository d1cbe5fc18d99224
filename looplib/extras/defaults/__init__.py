"""What looplib itself adds to each training; it knows of several rooms of extras, and none of them knows of it."""
