"use strict";
(() => {
  const data = JSON.parse(document.getElementById("token-data").textContent);
  const make = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const word = (place) => (place < 0 ? "?" : data.words[place]);
  const quoted = (place) => (place < 0 ? "what is not known" : /^#\d+$/.test(word(place)) ? word(place) : `"${word(place)}"`);
  const percent = (parts) => (parts === null ? "" : parts < 5 ? "< 0.1 %" : `${(parts / 100).toFixed(1)} %`);
  const share = (parts) => (parts === null ? "" : ` (${percent(parts)})`);
  const marks = { accepted: "+", rejected: "x", unreached: "-", target: "*" };
  const token = (place, kind, mark) => make("span", (mark ? `${marks[kind]} ` : "") + word(place), `token ${kind}`);

  function reason(rejection) {
    const [position, chosen, why, rank, probability, target, drafted, top] = rejection;
    let said = `position ${position}: the target chose ${quoted(chosen)}${share(target)}`;
    if (chosen < 0) said = `position ${position}: what the target chose is not known`;
    else if (why === "not in the draft vocabulary") said += ", which is not in the draft vocabulary";
    else if (rank !== null) said += `, rank ${rank} in the draft with ${percent(probability)}`;
    if (drafted !== null) said += `; it gave the rejected token ${percent(drafted)}`;
    const likeliest = top.map(([place, parts]) => `${quoted(place)} ${percent(parts)}`).join(", ");
    return likeliest ? `${said}. The draft had ${likeliest}` : said;
  }

  function round([number, anchor, accepted, cut, known, drafted, taken, bonus, rejection]) {
    const shown = make("div", undefined, "round");
    const after = known < 0 ? "" : ` after ${quoted(known)}`;
    const end = cut ? ", runs past the end of the output" : "";
    shown.append(make("div", `round ${number} at ${anchor}${after}: ${accepted} accepted${end}`, "dim"));
    if (data.chain) {
      drafted.forEach((place, at) => {
        const kind = at < accepted ? "accepted" : at === accepted ? "rejected" : "unreached";
        shown.append(token(place, kind, true));
      });
      if (bonus >= 0) shown.append(token(bonus, "target", true));
    } else {
      taken.forEach((place) => shown.append(token(place, "accepted", true)));
      if (bonus >= 0) shown.append(token(bonus, "target", true));
      drafted.forEach((place) => shown.append(token(place, "unreached", true)));
    }
    if (rejection) shown.append(make("div", reason(rejection), "dim"));
    return shown;
  }

  function show(request, firstRejected) {
    const place = document.getElementById("request");
    place.replaceChildren();
    if (!request) {
      place.append(make("p", "no request is left"));
      return;
    }
    const length = request.played ? ((request.accepted + request.played) / request.played).toFixed(3) : "-";
    place.append(make("p", `Request ${request.id} (${request.category}): ${request.output_tokens} output tokens, accept length ` +
      `${length} over ${request.played} rounds`));
    let prompt = `prompt of ${request.prompt_tokens} tokens`;
    if (request.cached) prompt += `, ${request.cached} of them cached`;
    if (request.pieces.length > 1) prompt += `, prefilled in pieces of ${request.pieces.join(", ")}`;
    place.append(make("p", prompt, "dim"));
    if (request.prompt !== null) place.append(make("div", request.prompt, "text prompt"));
    const text = make("div", undefined, "text");
    if (request.rounds.length && request.rounds[0][4] >= 0) text.append(token(request.rounds[0][4], "target", false));
    for (const one of request.rounds) {
      one[6].forEach((at) => text.append(token(at, "accepted", false)));
      if (one[7] >= 0) text.append(token(one[7], "target", false));
    }
    place.append(text);
    for (const one of request.rounds) if (!firstRejected || one[2] === 0) place.append(round(one));
  }

  const form = document.getElementById("filters");
  const labelled = (text, control) => {
    const label = make("label", `${text} `);
    label.append(control);
    form.append(label);
    return control;
  };
  const category = labelled("category", make("select"));
  const only = labelled("only rounds whose first token was rejected", make("input"));
  only.type = "checkbox";
  const request = labelled("request", make("select"));
  // Values are numbers: the text of an option loses spaces, and a category may be called as the first one is.
  const option = (text, value) => Object.assign(make("option", text), { value: String(value) });
  const categories = [...new Set(data.requests.map((one) => one.category))];
  category.append(option("all categories", -1), ...categories.map(option));

  const wanted = () => data.requests.filter((one) =>
    (category.value === "-1" || one.category === categories[Number(category.value)]) && (!only.checked || one.rounds.some((row) => row[2] === 0)));
  function refill() {
    const before = request.value;
    const left = wanted().map((one) => data.requests.indexOf(one));
    request.replaceChildren(...left.map((place) => option(data.requests[place].id, place)));
    if (left.includes(Number(before)) && before !== "") request.value = before;
    choose();
  }
  const choose = () => show(request.value === "" ? undefined : data.requests[Number(request.value)], only.checked);
  category.addEventListener("change", refill);
  only.addEventListener("change", refill);
  request.addEventListener("change", choose);
  form.addEventListener("submit", (event) => event.preventDefault());

  const legend = document.getElementById("legend");
  legend.append(`Variant ${data.variant}. `);
  for (const [kind, said] of [["accepted", "accepted"], ["rejected", "first rejected"], ["unreached", "behind it, not looked at"],
    ["target", "the target's own token"]]) legend.append(make("span", `${marks[kind]} ${said}`, `token ${kind}`));
  for (const note of data.notes) legend.after(make("p", `Not shown: ${note}`, "dim"));
  refill();
})();
