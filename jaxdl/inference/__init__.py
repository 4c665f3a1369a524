"""What a finished run is used for: prediction, generated texts, scores, translations, exports, conversions."""
