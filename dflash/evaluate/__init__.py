"""What a server will see: prompts decoded with and without the drafter."""
