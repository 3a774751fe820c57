# `make drills`: faults injected into a served checkpoint, a short form of each drill (about 23 minutes).
# `make drills-full` takes as long as docs/reliability.md says (about 123 minutes). Rows go to build/drills.jsonl.
.PHONY: drills drills-full
DRILL := timeout --kill-after=60
ROWS  := --output build/drills.jsonl
drills: setup
	$(DRILL) 600 $(BIN)/python -m tests.drills kill --duration 60 $(ROWS)
	$(DRILL) 900 $(BIN)/python -m tests.drills again --rounds 6 --others 1 $(ROWS)
	$(DRILL) 900 $(BIN)/python -m tests.drills freeze --duration 12 --period 2 --hang-timeout 5 --streams 4 $(ROWS)
	$(DRILL) 600 $(BIN)/python -m tests.drills crash --duration 60 --streams 4 $(ROWS)
	$(DRILL) 900 $(BIN)/python -m tests.drills replace --duration 30 $(ROWS)
	$(DRILL) 900 $(BIN)/python -m tests.drills files --period 2 $(ROWS)
	$(DRILL) 600 $(BIN)/python -m tests.drills memory --duration 60 $(ROWS)
	$(DRILL) 600 $(BIN)/python -m tests.drills residents --duration 40 --streams 4 $(ROWS)
	$(DRILL) 600 $(BIN)/python -m tests.drills grammars --duration 20 $(ROWS)
	$(DRILL) 900 $(BIN)/python -m tests.drills malformed --requests 2000 $(ROWS)
	$(DRILL) 600 $(BIN)/python -m tests.drills soak --duration 120 --period 10 $(ROWS)

drills-full: setup
	$(DRILL) 1200 $(BIN)/python -m tests.drills kill $(ROWS)
	$(DRILL) 3600 $(BIN)/python -m tests.drills again $(ROWS)
	$(DRILL) 3000 $(BIN)/python -m tests.drills freeze $(ROWS)
	$(DRILL) 1200 $(BIN)/python -m tests.drills crash $(ROWS)
	$(DRILL) 1800 $(BIN)/python -m tests.drills replace $(ROWS)
	$(DRILL) 1800 $(BIN)/python -m tests.drills files $(ROWS)
	$(DRILL) 1200 $(BIN)/python -m tests.drills memory $(ROWS)
	$(DRILL) 900 $(BIN)/python -m tests.drills residents $(ROWS)
	$(DRILL) 900 $(BIN)/python -m tests.drills grammars $(ROWS)
	$(DRILL) 7200 $(BIN)/python -m tests.drills malformed $(ROWS)
	$(DRILL) 3000 $(BIN)/python -m tests.drills soak $(ROWS)
