"""What a training script uses to send hints."""
