"""What is written otherwise because OpenVINO gets it wrong, one file a fault, with the version that it was seen in."""
