"""How far it scales: what replicas decide together, by simulation."""
