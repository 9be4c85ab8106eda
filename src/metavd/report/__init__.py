"""What a person looks at: figures and pages."""
