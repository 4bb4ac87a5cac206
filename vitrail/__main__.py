"""`python -m vitrail`, and with it `torchrun -m vitrail train …`."""

from vitrail.cli import main

main()
