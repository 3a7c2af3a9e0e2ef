"""Write-back, recovery and verification of durable volumes."""
