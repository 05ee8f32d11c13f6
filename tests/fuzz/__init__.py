"""Coverage-guided and seeded fuzzing of whatever reads bytes that others send.

targets/    one file each: `SEEDS`, `WORDS` that mutations may put in, and `fuzz_one(data)`, which raises where
            something is wrong. What is wrong: any exception that is not declared, a result that depends on how the
            bytes were cut, more time than `LONGEST_S`.
mutate.py   inputs made of the seeds, the same for the same number
run.py      `python -m tests.fuzz.run`: long, with atheris where it is installed
test_fuzz.py  the seeds, and some mutations of each target, in `make test`
"""
