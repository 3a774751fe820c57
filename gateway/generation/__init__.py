"""One request at the engine: the served model, the job, its images, and what its outputs become."""
