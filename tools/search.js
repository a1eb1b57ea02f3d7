// node tools/search.js SITE: the words of the home page's table, typed into the site's own search, lead to one of the
// pages that their row links, among the first three results.
const fs = require("fs"), path = require("path"), vm = require("vm");

const site = path.resolve(process.argv[2]);
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name));
let listener, answer;
const self = {
  addEventListener: (_, handler) => { listener = handler; },
  postMessage: message => answer(message),
  console,
};
self.self = self;
vm.runInNewContext(fs.readFileSync(path.join(workers, worker), "utf8"), self);
const send = message => new Promise(resolve => { answer = resolve; listener({ data: message }); });

const home = fs.readFileSync(path.join(__dirname, "../docs/index.md"), "utf8");
const table = home.split("## The word you have in mind")[1].split("\n## ")[0];
const rows = [...table.matchAll(/^\| (?!word \||-)(.*?) \| (.*) \|$/gm)].map(([, words, pages]) => ({
  words: words.split(", "),
  pages: [...pages.matchAll(/\]\(([^)]*?)\.md[)#]/g)].map(([, page]) => `${page}/`),
}));

(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await send({ type: 0, data: { ...index, options: { suggest: false } } });
  let checked = 0, lost = 0;
  for (const { words, pages } of rows) {
    for (const word of words) {
      const { data } = await send({ type: 2, data: word });
      const first = data.items.slice(0, 3).map(results => results[0].location.split("#")[0]);
      checked += 1;
      if (first.some(page => pages.includes(page))) continue;
      lost += 1;
      console.log(`search: ${word} leads to ${first.join(", ")}, not to ${pages.join(", ")}`);
    }
  }
  console.log(`search: ${checked - lost} of ${checked} words lead to a page of their row`);
  process.exit(lost || !checked ? 1 : 0);
})();
