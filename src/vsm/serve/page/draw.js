// Draw: teach characters by drawing them, then ask.

import { exampleThumbnail } from "./api.js";
import { AnswerView, coverageControls, explainAnswer, recalledTiles, thumbnail } from "./answers.js";
import { byId, cross, make, plural, say, telling, toast } from "./dom.js";
import { TaskMap } from "./maps.js";
import { Pad } from "./pad.js";
import { addExamples, classes, classify, colorOf, listen, removeExample, state } from "./state.js";

const PAUSE = 120; // milliseconds after a stroke

export function startDraw(taskName) {
  const notice = byId("teach-notice");
  const name = byId("teach-name");
  const teach = new Pad(byId("teach-pad"), () => say(notice, null));
  const asking = startAsking();
  const map = new TaskMap(byId("task-map"));
  const drawCoverage = coverageControls(byId("draw-coverage"));
  buttons("teach", teach);

  byId("teach-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const label = name.value.trim();
    const lacking = teach.isEmpty ? "Draw the character first." : label ? null : "Name the character first.";
    if (lacking) {
      say(notice, lacking);
      (teach.isEmpty ? byId("teach-pad") : name).focus();
      return;
    }
    await telling(notice, async () => {
      const count = classes().get(label)?.length ?? 0;
      const file = await teach.file(`drawing ${count + 1}`, state.model.side);
      await addExamples(label, [file], taskName);
      teach.clear();
      name.value = "";
    });
  });

  const drawClasses = () => {
    const cards = [...classes()].map(([label, examples]) => classCard(label, examples, notice, (chosen) => {
      name.value = chosen;
      byId("teach-pad").focus();
    }));
    byId("classes").replaceChildren(...cards);
    if (!cards.length) byId("classes").append(make("li", { class: "blank" }, "No classes yet. The first drawing makes one."));
    byId("teach-names").replaceChildren(...[...classes().keys()].map((label) => make("option", { value: label })));
  };

  const everything = () => {
    drawClasses();
    asking.ask();
    map.update().catch((error) => say(byId("ask-notice"), error));
  };
  listen("task", everything);
  listen("memory", everything);
  listen("model", drawCoverage);
  listen("reject", () => {
    drawCoverage();
    asking.ask();
  });
  drawCoverage();
  return everything;
}

function buttons(which, pad) {
  byId(`${which}-undo`).addEventListener("click", () => pad.undo());
  byId(`${which}-clear`).addEventListener("click", () => pad.clear());
}

function classCard(label, examples, notice, choose) {
  const more = `Another example of ${label}`;
  const card = make(
    "li",
    { class: "class" },
    make(
      "header",
      {},
      make("span", { class: "name", title: label }, label),
      make("button", { type: "button", class: "quiet", "aria-label": more, title: more, onclick: () => choose(label) }, "+"),
    ),
    exampleList(label, examples, notice),
  );
  card.style.setProperty("--own", colorOf(label));
  return card;
}

// Thumbnails of examples, each with a button that takes it away; also used for photographs.
export function exampleList(label, examples, notice) {
  const list = make("ul", { class: "examples", "aria-label": `${plural(examples.length, "example")} of ${label}` });
  for (const { id, file } of examples) {
    const remove = () =>
      telling(notice, async () => {
        const original = await removeExample(id);
        const undo = original && {
          action: "Undo",
          act: () => telling(notice, () => addExamples(original.label, [original.file])),
        };
        toast(`Removed an example of ${label}.`, undo ?? {});
      });
    const image = thumbnail(exampleThumbnail(state.task.id, id), file);
    list.append(make("li", { class: "example", title: file }, image, cross(`Remove ${file} of ${label}`, remove)));
  }
  return list;
}

function startAsking() {
  const notice = byId("ask-notice");
  const explain = byId("ask-explain");
  const view = new AnswerView(byId("ask-answer"));
  const pad = new Pad(byId("ask-pad"), () => ask());
  let timer = null;
  let under = null; // the request under way
  buttons("ask", pad);

  const wait = () => {
    explain.disabled = true;
    recalledTiles(byId("recalled"), []);
    const count = classes().size;
    view.wait(count === 0 ? "Teach a class first." : count === 1 ? "One class so far; add another." : "Draw to ask.");
  };

  const question = () => pad.file("question", state.model.side);

  const now = async () => {
    under?.abort();
    const mine = (under = new AbortController());
    if (pad.isEmpty || !classes().size) {
      say(notice, null);
      wait();
      return;
    }
    await telling(notice, async () => {
      const [answer] = await classify([await question()], { signal: mine.signal });
      if (mine !== under || pad.isEmpty) return;
      view.show(answer);
      recalledTiles(byId("recalled"), answer.recalled);
      explain.disabled = false;
    });
  };

  const ask = () => {
    clearTimeout(timer);
    timer = setTimeout(now, PAUSE);
  };

  explain.addEventListener("click", () =>
    telling(notice, async () => {
      const [answer] = await classify([await question()], { explain: true });
      await explainAnswer(answer);
    }),
  );
  wait();
  return { ask };
}
