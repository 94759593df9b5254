"""Row transforms: what happens to rows between table and objective, and to gradients on the way back."""
