{
  const form = document.getElementById("form"), main = document.getElementById("main");
  const status = document.getElementById("status"), token = document.body.dataset.token;
  const at = (id) => document.getElementById(id);
  const sliders = [...document.querySelectorAll("[data-for]")];
  let running = null, before = null, timer = 0;

  const tell = (text, kind = "") => { status.textContent = text; status.className = kind; };

  // --- sliders and the numbers beside them

  const positions = (slider) => slider.dataset.positions.split(" ").map(Number);
  const memory = () => Number(at("profile").selectedOptions[0].dataset.gib);
  const said = (slider, value) => slider.setAttribute("aria-valuetext", value || "all");
  const follow = (slider) => {
    const number = at(slider.dataset.for), stops = positions(slider);
    const value = number.value === "" ? stops[stops.length - 1] : Number(number.value);
    let nearest = 0;
    stops.forEach((stop, place) => {
      if (Math.abs(stop - value) < Math.abs(stops[nearest] - value)) nearest = place;
    });
    slider.value = nearest;
    said(slider, number.value);
  };
  const moved = (slider) => {
    const number = at(slider.dataset.for), stops = positions(slider);
    const last = number.id === "memory_limit" && Number(slider.value) === stops.length - 1;
    number.value = last ? "" : stops[slider.value];  // all of the memory: no limit
    said(slider, number.value);
  };
  const fitMemory = () => {
    const slider = at("memory_limit-slider"), gib = memory(), stops = [];
    for (let step = 1; step <= 20; step++) stops.push(Math.round(gib * step) / 20);
    slider.dataset.positions = stops.map((stop) => Number(stop.toPrecision(4))).join(" ");
    slider.max = stops.length - 1;
    at("memory_limit").placeholder = gib.toFixed(1);
    if (Number(at("memory_limit").value) > gib) at("memory_limit").value = "";
    follow(slider);
  };
  const fitModel = () => {
    const isFile = at("model").value !== "";
    at("sizes").hidden = isFile;
    at("length").placeholder = isFile ? "the file's" : "";
    if (isFile && !at("length").dataset.own) at("length").value = "";
    if (!isFile && at("length").value === "") at("length").value = "4096";
    follow(at("length-slider"));
    at("of-file").hidden = !isFile;
  };

  // --- questions and answers

  const asked = () => {
    const words = new URLSearchParams();
    const isFile = at("model").value !== "";
    for (const [name, value] of new FormData(form)) {
      if (value === "" || (isFile && at(name).closest("#sizes"))) continue;
      words.set(name, value);
    }
    return words;
  };
  const change = (now, then, higherIsBetter) => {
    if (!then || !now || Math.abs(now / then - 1) < 5e-4) return null;
    const percent = 100 * (now / then - 1), mark = document.createElement("span");
    mark.className = "change " + ((percent > 0) === higherIsBetter ? "better" : "worse");
    mark.textContent = `${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(1)}%`;
    mark.title = "against the plan before";
    return mark;
  };
  const compare = (now) => {
    if (!before) return;
    const rate = now.tokens_per_s ? "tokens_per_s" : "samples_per_s";
    const order = [["step_s", false], [rate, true], ["mfu", true], ["peak_bytes", false]];
    const figures = document.querySelectorAll("#head .tiles dd:not(.note)");
    order.forEach(([name, higher], place) => {
      const mark = change(now[name], before[name], higher);
      if (mark && figures[place]) figures[place].append(mark);
    });
  };
  const show = (answer) => {
    for (const chart of document.querySelectorAll(".chart")) Plotly.purge(chart);
    const open = [...document.querySelectorAll("#rest details, #head details")].map((d) => d.open);
    at("head").innerHTML = answer.head;
    at("rest").innerHTML = answer.rest;
    document.querySelectorAll("#rest details, #head details").forEach((d, n) => { d.open = open[n] || false; });
    for (const [name, value] of Object.entries(answer.chosen)) {
      at(name + "-found").textContent = value;
      at(name).closest(".choice").classList.toggle("fixed", at(name).value !== "");
    }
    compare(answer.numbers);
    at("chosen").hidden = at("links").hidden = false;
    const words = asked();
    words.set("token", token);
    at("to-report").href = "/report?" + words;
    at("to-plan").href = "/plan.json?" + words;
    main.classList.remove("stale");
    charts.show(answer);
  };
  const seconds = (value) => value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
  const take = (message) => {
    if (message.kind === "progress") tell(message.doing + "…", "busy");
    else if (message.kind === "answer") {
      show(message);
      if (message.is_last) {
        before = message.numbers;
        tell(`Answered in ${seconds(message.seconds)}.`);
        document.documentElement.dataset.answers = Number(document.documentElement.dataset.answers || 0) + 1;
      } else tell("Best so far; searching on…", "busy");
    } else tell(message.reasons ? message.reasons.join(" ") : message.error, "wrong");
  };
  const ask = async () => {
    if (running) running.abort();  // the server stops the old search
    const mine = running = new AbortController(), words = asked();
    const shown = new URLSearchParams(words);
    shown.set("token", token);
    history.replaceState(null, "", "?" + shown);
    main.classList.add("stale");
    tell("Searching…", "busy");
    try {
      const response = await fetch("/answer?" + shown, { signal: mine.signal });
      if (!response.ok) return tell(await response.text(), "wrong");
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (mine.signal.aborted) return;
        if (done) break;
        text += value;
        const lines = text.split("\n");
        text = lines.pop();
        for (const line of lines) if (line) take(JSON.parse(line));
      }
    } catch (error) {
      if (!mine.signal.aborted) tell("planner ui has ended; start it again and open its new address.", "wrong");
    }
  };
  const askSoon = (wait) => { clearTimeout(timer); timer = setTimeout(ask, wait); };

  // --- what the reader does

  document.addEventListener("input", (event) => {
    const on = event.target;
    if (on.matches("[data-for]")) { moved(on); if (on.id === "length-slider") at("length").dataset.own = 1; askSoon(120); }
    else if (on.tagName === "INPUT" && on.name) {
      const slider = at(on.id + "-slider");
      if (slider) follow(slider);
      if (on.id === "length") on.dataset.own = 1;
      if (on.closest("#sizes")) at("preset").value = "";
      askSoon(500);
    }
  });
  document.addEventListener("change", (event) => {
    const on = event.target;
    if (on.id === "explain") form.classList.toggle("terse", !on.checked);
    if (on.tagName !== "SELECT" || on.dataset.choice) return;
    if (on.id === "preset") {
      if (on.value === "") return;
      for (const [name, value] of Object.entries(JSON.parse(on.value))) at(name).value = value;
    }
    if (on.closest("#sizes") && on.id !== "preset") at("preset").value = "";
    if (on.id === "profile") fitMemory();
    if (on.id === "model") fitModel();
    askSoon(0);
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); askSoon(0); });

  // The address holds the question: what it says is put into the form.
  for (const [name, value] of new URLSearchParams(location.search)) {
    const field = at(name);
    if (field && field.name === name) field.value = value;
    if (name === "length") field.dataset.own = 1;
  }
  const preset = JSON.parse(at("preset").value || "{}");
  if (Object.keys(preset).some((name) => at(name).value !== "" && at(name).value !== String(preset[name]))) at("preset").value = "";
  fitMemory();
  fitModel();
  sliders.forEach(follow);
  ask();
}
