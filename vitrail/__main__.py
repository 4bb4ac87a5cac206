"""`python -m vitrail`, and with it `torchrun -m vitrail train …`."""

from vitrail.cli.main import main

main()
