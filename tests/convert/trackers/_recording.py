"""What the stand-ins record, a line for each, beside the script or where another store says."""


def record(text, store="records.txt"):
    with open(store, "a") as file:
        file.write(text + "\n")
