"""Running attention: backends, kernels on a device, context parallelism. Takes bound masks; knows no source text."""

if __name__ != "maskc.runtime":  # reached by the link in the root of the repository
    raise ImportError("import maskc.runtime: under another name its classes would exist twice")
