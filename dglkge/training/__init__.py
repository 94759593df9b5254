"""Training: ``build`` builds, ``trainer`` runs, ``train_step`` computes."""
