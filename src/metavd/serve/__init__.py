"""What a trained model is for: personalise, predict, export."""
